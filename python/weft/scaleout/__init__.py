"""What the network engine needs besides Weft: NCCL, and its headers for the kernel compiler."""

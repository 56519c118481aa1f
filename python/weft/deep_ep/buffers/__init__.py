"""Where DeepEP 2 keeps its buffers: `legacy` (V1) and `elastic` (V2)."""

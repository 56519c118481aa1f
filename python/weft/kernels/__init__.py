"""GPU kernels as Python sees them: compiler, cache, compiling ahead, and which kernels a call takes."""

"""Triton's kernels (`attn.kernels`) launched by XLA, compiled without torch and by no toolchain but Triton's own."""

"""Triton kernels under torch, one public function a file: they import nothing of `attn` but kernels, and no backend."""

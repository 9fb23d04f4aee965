"""Triton kernels for torch, one public function per file. They import no other part of `attn`, and no backend."""

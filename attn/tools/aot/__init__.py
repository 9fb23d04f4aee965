"""Compilation of kernels for devices that this machine does not have."""

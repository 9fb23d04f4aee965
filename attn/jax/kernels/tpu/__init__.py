"""Pallas kernels for TPUs, tested in TPU interpret mode and compiled by libtpu ahead of time."""

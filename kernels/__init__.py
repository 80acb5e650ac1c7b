"""Kernels: torch and triton only, each with its reference beside it."""

"""Tests of the Triton kernels: on a card, or with TRITON_INTERPRET=1 on the CPU, where they are slow."""

"""Measuring on GPUs: one timing loop, one profiler reader, one roof."""

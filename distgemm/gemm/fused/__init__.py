"""The fused kernel: all GEMMs of a rank as one persistent kernel."""

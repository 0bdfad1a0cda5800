"""The benchmark: layers of Llama on GPUs, by this library, NCCL, torch and other libraries."""

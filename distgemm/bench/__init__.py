"""The benchmark: layers of Llama on GPUs beside NCCL, torch and other libraries."""

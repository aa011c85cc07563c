"""HAP: a compiler that trains PyTorch models on GPUs that are not all alike."""
__version__ = "0.1.0"

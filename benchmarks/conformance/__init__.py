"""Third-party models trained under half of their activation memory, compared bitwise with training without swapping."""

"""Small training scripts that show how to use the package."""

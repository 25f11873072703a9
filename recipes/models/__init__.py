"""What is trained: architectures, layouts, and a file for each recipe."""

"""What a recipe comes to before it runs: jobs, parameters, memory, traffic, a dry run."""

"""What compression costs in quality: texts, tasks, metrics and methods, each method as served."""

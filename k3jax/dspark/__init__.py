"""DSpark draft models: configuration, tensors, module, files."""

"""The field's own lists of models: each model in a process of its own, beside its peers."""

"""Controlled fine-tuning experiments: whether the drift does anything that chance would not do."""

"""`pageray bench gpu`: is every kernel right on this GPU, how fast is it, and does a model run."""

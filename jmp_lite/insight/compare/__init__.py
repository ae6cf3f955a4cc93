"""Mixed precision beside float32, op by op."""

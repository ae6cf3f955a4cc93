"""What precision is: dtypes and their names, casts of pytrees, policies."""

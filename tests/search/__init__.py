"""A search for programs in which "mixed" loses what "O1" keeps."""

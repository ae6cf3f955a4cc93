"""Reading, analysing and rebuilding jaxprs."""

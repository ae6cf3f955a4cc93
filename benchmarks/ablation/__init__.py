"""What is lost without a rule or a feature of the package."""

"""What a person reads and decides with: an opened study, the SLA pick, figures and the report."""

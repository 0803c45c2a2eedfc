"""The paper's tables and figures run again, and studies of what decides between methods."""

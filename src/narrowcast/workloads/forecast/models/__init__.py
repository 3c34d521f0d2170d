"""The networks of the forecast workload."""

"""What benchmarks share: a light client, figures and their table, CPU time of processes."""

"""What makes our numbers and pictures: training runs, the paper's tables, comparisons, benchmarks, the lab."""

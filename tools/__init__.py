"""Programs beside the product: the demonstration, benchmarks and chaos."""

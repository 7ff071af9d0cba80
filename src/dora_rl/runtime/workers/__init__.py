"""What runs inside a worker process. A worker knows neither the core nor where it runs."""

"""What fused modules compute with on a CPU, compiled."""

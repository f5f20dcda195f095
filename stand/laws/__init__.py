"""Laws of a step on a CPU, compiled: temperature, filters and the best tokens in few passes and without a sort."""

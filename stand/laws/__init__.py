"""The law that a row is drawn from: processors, temperature and filters; on a CPU in few passes, without a sort."""

"""What scripts run on: problems and their answers, recordings, model shapes, synthetic laws."""

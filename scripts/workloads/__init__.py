"""What scripts run on: problems and their answers, recordings, real models, model shapes, random drafts."""

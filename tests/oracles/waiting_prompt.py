"""Prompts that are read late."""

import threading

PATIENCE = 60  # seconds; a run that hangs fails its test


class WaitingPrompt(list):
    """A prompt that is read when others have been submitted."""

    def __init__(self, event: threading.Event, prompt: list[int]):
        super().__init__(prompt)
        self._event = event

    def __iter__(self):
        self._event.wait(PATIENCE)
        return super().__iter__()

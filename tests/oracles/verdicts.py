"""Room for what a device rule decides, full of what no rule writes."""

import torch

from stand.gpu.device_rule import DeviceVerdict


def blank_verdict(num_rows: int, width: int) -> DeviceVerdict:
    stops, tokens = torch.full((2, num_rows), -7)
    broken = torch.full((num_rows,), -7, dtype=torch.int32)
    return DeviceVerdict(stops, tokens, broken, torch.full((num_rows, width), -7))

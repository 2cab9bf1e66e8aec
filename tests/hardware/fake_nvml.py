"""A stand-in for the pynvml module: one GPU whose answers a test writes down; what it leaves out is not supported."""

from types import SimpleNamespace

import pynvml


class FakeNvml:
    """``answers`` maps a call's name to its answer, or to a dict by link number; ``fields`` maps (field, scope)."""

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_NVLINK_DEVICE_TYPE_IBMNPU = pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU
    NVML_FI_DEV_C2C_LINK_COUNT = pynvml.NVML_FI_DEV_C2C_LINK_COUNT
    NVML_FI_DEV_C2C_LINK_GET_STATUS = pynvml.NVML_FI_DEV_C2C_LINK_GET_STATUS
    NVML_FI_DEV_C2C_LINK_GET_MAX_BW = pynvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW

    def __init__(self, answers=None, fields=None):
        self.answers, self.fields = answers or {}, fields

    def __getattr__(self, name):
        if not name.startswith("nvmlDevice") or not hasattr(pynvml, name):
            raise AttributeError(f"pynvml has no {name}")

        def call(handle, *arguments):
            assert handle == "gpu"
            if name == "nvmlDeviceGetFieldValues" and self.fields is not None:
                return [self._field(wanted) for wanted in arguments[0]]
            answer = self.answers.get(name)
            if isinstance(answer, dict):
                answer = answer.get(arguments[0])
            if answer is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer

        return call

    def _field(self, wanted):
        key = wanted if isinstance(wanted, tuple) else (wanted, 0)
        if key not in self.fields:
            return SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
        value = pynvml.c_nvmlFieldValue_t()
        value.nvmlReturn = pynvml.NVML_SUCCESS
        value.valueType, value.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, self.fields[key]
        return value


def pcie(generation, width, max_generation=None, max_width=None):
    """The answers of a GPU in a PCIe slot."""
    return {
        "nvmlDeviceGetCurrPcieLinkGeneration": generation,
        "nvmlDeviceGetCurrPcieLinkWidth": width,
        "nvmlDeviceGetMaxPcieLinkGeneration": max_generation or generation,
        "nvmlDeviceGetMaxPcieLinkWidth": max_width or width,
    }


def nvlinks(remote_types, version):
    """The answers about NVLinks that are up, one for each type of the other end."""
    return {
        "nvmlDeviceGetNvLinkState": dict.fromkeys(range(len(remote_types)), 1),
        "nvmlDeviceGetNvLinkRemoteDeviceType": dict(enumerate(remote_types)),
        "nvmlDeviceGetNvLinkVersion": dict.fromkeys(range(len(remote_types)), version),
    }

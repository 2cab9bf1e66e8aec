// A driver of CUDA 10.2, which is too old.
extern "C" int cuDriverGetVersion(int* version) { return *version = 10020, 0; }

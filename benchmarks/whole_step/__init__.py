"""Whole training steps, planned for described machines, beside the schedules of other tools at the same peak.

The machines, with rates as published or measured by others, and the share of the peak that training reaches:

============  =======================================  ==================  =====  ==================================
file          compute (bf16, dense)                    memory              bytes  link, each way
============  =======================================  ==================  =====  ==================================
h100_sxm      989 TFLOP/s x 0.60 (NVIDIA H100 sheet)   3.35 TB/s           80 GB  PCIe 5: 55 GB/s, 45 while both run
rtx4090       165 TFLOP/s x 0.72 (NVIDIA Ada paper)    1.0 TB/s            24 GB  PCIe 4: 24 GB/s
gh200         989 TFLOP/s x 0.60 (NVIDIA GH200 sheet)  4.0 TB/s            96 GB  C2C: 300 GB/s; host memory gives 450
                                                                                  to both directions together
============  =======================================  ==================  =====  ==================================

The shares are those that LLMQ (arXiv 2512.15306) reports for 7 to 14 billion parameters.
"""

# a program of DeepSpeed's

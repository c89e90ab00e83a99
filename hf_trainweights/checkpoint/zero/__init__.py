"""A checkpoint of DeepSpeed's ZeRO: flat float32 partitions, one file for each rank."""

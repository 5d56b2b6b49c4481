"""What is kept: a run's state in files that any mesh can read.

boxes        boxes of a whole tensor: what a rank holds, and what of that it writes
held         Held: what a rank holds of one tensor
tensor_file  tensors in a file of the safetensors format
checksum     CRC-32, by whatever is fastest
index        which slices of which tensor lie in which file
folder       complete checkpoints: named, found, deleted
saver        copied, written in a thread, committed by all ranks together
hf_folder    weights in a folder of Hugging Face
source       weights read box by box, of a checkpoint or another folder
"""

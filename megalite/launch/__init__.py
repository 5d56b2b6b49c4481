"""On which machines: the command line, and how ranks are started.

cli           megalite train | verify                   local     starting the ranks of one machine
data_command  megalite data, data audit                 torchrun  joining ranks that torchrun has started
draw_command  megalite draw                             prepare   the corpus and the data, before
export_command  megalite export                         export    a checkpoint as a Hugging Face folder
generate_command  megalite generate
on_ranks      from a config onto the ranks              attempt   ranks of one attempt find each other
guarded       around the run of one rank                status    run_status.json: how a run ended
fingerprint   what must be alike on all ranks
stored        a model kept in a run or a Hugging Face folder
"""

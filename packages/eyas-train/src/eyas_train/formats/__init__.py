"""Formats of heads, written for the engines that read them. One file is one format; `eyas_train.exports` finds it.

A format is a module with

    NAME, EXPORTS    its name for `eyas export`, which formats of several methods may share; the methods whose heads it holds
    export           (method, our config, our tensors, target) -> config.json and the tensors. Raises CheckpointError, with the reason,
                     when the engines would compute something else
    usage            (method, our config, folder, target) -> lines, of a shell or of Python, by which the engines run the head
    EXPORT_FILE      where the weights are not published as model.safetensors
    finish           (folder, target), where the engine needs more files
    SUFFIX, DTYPES, write_file    where the format is one of single files: its ending, the types of matrices, and
                                  (path, settings, tensors, target, dtype), which writes it

Other distributions name theirs as entry points of the group "eyas.formats".
"""

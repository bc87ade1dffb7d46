"""Flags of other trainers (timm, torchvision, ultralytics, Transformers, Lightning), and what they are here.

Only words that no similarity of letters leads to, or for which it leads to another flag.
"""

_WORDS_BY_FLAGS = {
    "--accumulate": "--accum-iter --grad-accum --grad-accum-steps --gradient-accumulation "
    "--gradient-accumulation-steps --iters-to-accumulate",
    "--augment": "--aa --aug --auto-augment",
    "--augment none": "--no-aug",
    "--batch-size": "-b --bs --per-device-train-batch-size",
    "--batch-size auto": "--auto-batch --auto-find-batch-size --auto-scale-batch-size",
    "--best": "--checkpoint-metric --eval-metric --metric-for-best-model --monitor",
    "--checkpoint-every": "--recovery-interval --save-every --save-interval --save-period --save-steps",
    "--class-weights": "--class-weight",
    "--clip-norm": "--clip-grad-norm --grad-clip --grad-norm --gradient-clip --gradient-clip-val "
    "--max-grad-norm",
    "--config": "-c --args --hparams --yaml",
    "--crop": "--interpolation --train-interpolation",
    "--crop-scale": "--scale",
    "--device": "--accelerator --gpu --gpu-id --gpu-ids",
    "--device cpu": "--cpu --no-cuda --use-cpu",
    "--device cuda": "--cuda",
    "--dry-run": "--fast-dev-run",
    "--duration": "--iterations --iters --max-iters --max-steps --num-steps --steps --total-steps",
    "--early-stop": "--early-stopping-patience",
    "--ema": "--ema-decay --model-ema --model-ema-decay",
    "--epochs": "--num-train-epochs",
    "--eval-size": "--val-resize-size --test-img-size",
    "--find-lr": "--auto-lr --auto-lr-find --lr-find --lr-finder",
    "--fresh": "--exist-ok --no-resume --overwrite --overwrite-output-dir",
    "--gamma": "--decay-rate --lr-gamma",
    "--image-size": "--img --imgsz --resize --resolution --train-crop-size",
    "--keep": "--checkpoint-hist --save-top-k --save-total-limit",
    "--label-smoothing": "--smoothing",
    "--layer-decay": "--llrd",
    "--log-every": "--log-interval --log-steps --logging-steps --print-freq --print-interval",
    "--lr": "--base-lr --blr --learning-rate --lr-base --lr-max --max-lr",
    "--milestones": "--decay-epochs --decay-milestones --lr-milestones --lr-step-size --lr-steps --step-size",
    "--model": "-m --arch --backbone --model-name-or-path --net --network",
    "--optimizer": "--algo",
    "--out": "-o --default-root-dir --exp --exp-name --experiment --log-dir --logdir --logging-dir --name "
    "--output --output-dir --project --run-name --save --save-dir --work-dir",
    "--plateau-factor": "--lr-factor",
    "--precision": "--amp --amp-dtype --dtype --use-amp",
    "--precision bf16": "--bf16",
    "--precision fp16": "--fp16 --half",
    "--precision tf32": "--tf32",
    "--procs": "--gpus --ngpu --ngpus --nproc-per-node --num-devices --num-gpus --num-processes "
    "--world-size",
    "--qat": "--quantize",
    "--random-erasing": "--erasing --reprob",
    "--recompute": "--activation-checkpointing --checkpoint-activations --grad-checkpointing "
    "--gradient-checkpointing",
    "--schedule cosine": "--cos-lr",
    "--schedule": "--lr-policy --lr-scheduler-type --sched",
    "--seed": "--manual-seed --random-seed",
    "--shard": "--deepspeed --strategy",
    "--shard fsdp": "--fsdp",
    "--sync-bn": "--sync-batchnorm",
    "--teacher": "--distill --kd",
    "--track": "--logger --report-to",
    "--track tensorboard": "--tb --tensorboard",
    "--track wandb": "--log-wandb --use-wandb --wandb",
    "--weight-decay": "--wd",
    "--weights": "--checkpoint --checkpoint-path --ckpt --ckpt-path --initial-checkpoint --load "
    "--pretrained-path",
    "--workers": "-j --dataloader-num-workers --nthreads --num-workers",
}
FLAG_OF = {word: flag for flag, words in _WORDS_BY_FLAGS.items() for word in words.split()}
"""The flag that does the same, of any command that has it; with a value where the word says which."""

_DATA = "the data are named without a flag: flambeau train DATA"
_HELD_OUT = "a tenth of each class is held out, unless DATA has train/ and val/"
_EVALUATES = "it evaluates after each epoch, and flambeau evaluate RUN does it on other images"
_CHOSEN = "it is chosen by itself"
_CONTINUES = "the same command continues the run in its folder"
_WORDS_BY_SENTENCE = {
    _DATA: "-d --data --data-dir --data-path --dataset --dataset-name --root --train-dir",
    _HELD_OUT: "--train-split --val-dir --val-fraction --val-size --val-split --validation-split",
    _CONTINUES: "-r --resume --resume-from --resume-from-checkpoint --start-epoch",
    _EVALUATES: "-e --check-val-every-n-epoch --do-eval --do-train --eval --eval-every --eval-interval "
    "--eval-only --eval-steps --eval-strategy --evaluate --evaluation-strategy --test-only "
    "--val-check-interval --val-interval",
    "the environment variable OMP_NUM_THREADS says how many, else all cores compute": "--cpu-threads "
    "--num-threads --threads",
    "the classes are those of the data": "--nb-classes --nc --num-classes",
    "they follow from the weights and the data": "--mean --std",
    "flambeau doctor shows what a step waits for and costs": "--profile --profiler",
    "the best weights are published in any case": "--load-best-model-at-end",
    "the algorithms are deterministic in any case": "--cudnn-benchmark --benchmark --deterministic",
    f"{_CHOSEN}: memory is pinned for a GPU": "--pin-mem --pin-memory --pin-memory-device",
    f"{_CHOSEN}: workers live on from epoch to epoch and read ahead": "--persistent-workers "
    "--prefetch-factor",
    f"{_CHOSEN}: convolutions run in channels-last format": "--channels-last",
    "flambeau pack makes one file that is read faster": "--cache-dataset --cache-images",
    "--loss chooses it, of those for the task": "--bce --bce-loss --criterion --loss-fn",
    "--task multilabel learns several labels per image": "--multi-label --multilabel",
    "--balance full draws each class equally often": "--oversample --weighted-sampler",
    "--schedule chooses where the learning rate ends": "--eta-min --final-lr --lr-min --lrf --min-lr",
    "--eval-size is the side of evaluated images": "--crop-pct",
    "dropout belongs to the model": "--drop --drop-rate --dropout",
    "DATA may be FILE.py:FUNCTION, which gives any part of them": "--fraction --limit-train-batches "
    "--max-samples --overfit-batches",
    "flambeau sweep --folds 5 trains all folds, and --fold 2/5 one of them": "--folds --kfold",
    "flambeau train has nothing like it": "--clip-mode --cooldown-epochs --max-time "
    "--opt-eps --ratio --vflip",
    "flambeau soup averages the weights of runs, and --ema those of one": "--swa",
    "flambeau launch starts processes on several machines": "--dist-backend --dist-url --nnodes "
    "--num-nodes",
}
FOR_TRAIN = {word: text for text, words in _WORDS_BY_SENTENCE.items() for word in words.split()}
"""What `flambeau train` does without a flag."""

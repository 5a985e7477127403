#!/bin/bash
# Start this script on each of one to four nodes; nodes may join and leave. After a failure or such
# a change, torchrun restarts the processes, and they resume from the newest checkpoint.
#
#     DATA=gs://bucket/train RUN=gs://bucket/run-1 RENDEZVOUS=node-0:29400 elastic.sh
set -euo pipefail

# Otherwise restarted processes may connect to the addresses of the previous ones, and hang
# (github.com/pytorch/pytorch/issues/135712; also in PyTorch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes "${NODES:-1:4}" \
    --nproc-per-node "${RANKS_PER_NODE:-8}" \
    --max-restarts 10 \
    --shutdown-timeout 280 \
    --rdzv-backend c10d \
    --rdzv-endpoint "${RENDEZVOUS:?set RENDEZVOUS to host:port of the first node}" \
    --rdzv-id "${JOB_ID:-train}" \
    "${TRAIN:-$(dirname "$0")/train.py}" --grace-seconds 280 \
    --data "${DATA:?set DATA to the uri of the training objects}" \
    --checkpoints "${RUN:?set RUN to the uri of the checkpoints}" "$@"

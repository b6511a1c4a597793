// nccl.h before 2.24 has its bf16 type where this says that there is one, and uses nothing else of it.
#pragma once

#define __CUDA_BF16_TYPES_EXIST__

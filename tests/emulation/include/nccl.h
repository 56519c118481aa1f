// Stands in for NCCL's header: what transport/rail_gin.cuh needs of it is in nccl_device.h.
#pragma once

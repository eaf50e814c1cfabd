// soft_dense_rows: the list of the rows whose self-conditioning embedding needs the dense product, in order; every row
// that does not is told so (SPARSE), every other gets its place in the list.
//
// soft   Soft [row_count]       of soft_select
// dense  int [1 + row_count]    how many; their rows; 0 beyond
// count  uint [1]               how many, for the host
//
// push: row_count; count_at. Groups: (1). ALL: every row, whatever soft_select found. Reference: cpu/soft.py soft_embedding.
//
// variant: soft_dense_rows
// variant: soft_dense_rows_all ALL
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint count_at;
    uint row_count;
};

#include "head.glsl"

layout(std430, binding = 0) buffer SoftRows { Soft soft[]; };
layout(std430, binding = 1) writeonly buffer Dense { int dense[]; };
layout(std430, binding = 2) writeonly buffer Count { uint count[]; };

shared uint counts[gl_WorkGroupSize.x];

void main() {
    const uint me = gl_LocalInvocationID.x;
    const uint run = (row_count + gl_WorkGroupSize.x - 1) / gl_WorkGroupSize.x;
    const uint begin = min(me * run, row_count), end = min(begin + run, row_count);
    uint own = 0;
    for (uint row = begin; row < end; row++) {
#ifdef ALL
        soft[row] = Soft(0.0, 0, 0);
#endif
        own += soft[row].dense != SPARSE ? 1 : 0;
    }
    counts[me] = own;
    barrier();
    uint at = 0, all = 0;
    for (uint i = 0; i < gl_WorkGroupSize.x; i++) {
        at += i < me ? counts[i] : 0;
        all += counts[i];
    }
    for (uint row = begin; row < end; row++) {
        if (soft[row].dense != SPARSE) {
            soft[row].dense = at;
            dense[1 + at] = int(row);
            at++;
        }
        if (row >= all) {
            dense[1 + row] = 0;
        }
    }
    if (me == 0) {
        dense[0] = int(all);
        count[count_at] = all;
    }
}
